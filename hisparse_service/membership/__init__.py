"""Who: sessions, credentials and liveness."""
