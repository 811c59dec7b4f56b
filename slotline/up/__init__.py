"""`slotline up`: Redis, web API and one worker on this machine, started, watched and stopped together."""
