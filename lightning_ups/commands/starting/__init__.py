"""Commands for the first hour: recipes to start from, and settings of other tools brought here."""
