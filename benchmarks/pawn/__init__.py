"""Makes pawn, the bundled model: corpus, network, scorers, measurements and the folder that ships."""
