"""Resumption of an answer at another instance after its engine is lost."""
