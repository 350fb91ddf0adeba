"""Ray on two nodes."""
