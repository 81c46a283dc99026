"""The admin listener's pages: state of the fleet, metrics, decisions, and the operator's changes."""
