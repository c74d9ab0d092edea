"""Plans and graphs as text a person reads."""
