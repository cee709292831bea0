"""The page at `/`: what this service is doing, as a picture that moves with it, and a place to talk to it."""
