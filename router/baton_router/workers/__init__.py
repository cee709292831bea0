"""Workers as the router knows them: discovery, health, load, and learned costs."""
