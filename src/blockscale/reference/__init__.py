"""The meaning of every operator, in plain torch: the specification that runs."""
