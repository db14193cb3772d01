"""A model of the commit rule and the recovery protocol, explored state by state."""
