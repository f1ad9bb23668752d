"""HTTP server for trained models: access control, limits, batching, and epoch updates."""
