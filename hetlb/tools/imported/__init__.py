"""Files of other balancers, read into a draft of a fleet file, with a line for each unused setting."""
