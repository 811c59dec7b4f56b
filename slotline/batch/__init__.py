"""`slotline batch`: files of prompts run by a script, or handed to the server as its batches."""
