"""The model side: pulls jobs into slots and generates with continuous batching. No Flask here."""
