"""Files of other balancers, read into a draft of a fleet file, with a line for what it does not hold."""
