"""The commands beside `fit`: each parses its arguments and prints."""
