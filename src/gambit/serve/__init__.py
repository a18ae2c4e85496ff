"""`gambit serve`: searches behind OpenAI's API, with a page that shows them live."""
