"""One file per command: flags, one call into a room, one rendering."""
