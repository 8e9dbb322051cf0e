"""Everything that a stranger may try, against a real node over real p2pd."""
