"""How pawn, the bundled model, is made: corpus, network, scorers, measurements and the folder that ships."""
