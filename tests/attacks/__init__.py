"""Attacks of unknown peers on a real node over real p2pd."""
