"""Trains a verifier on a collection and reads collections with one."""
