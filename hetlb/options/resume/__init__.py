"""An answer whose engine is lost goes on at another instance."""
