"""What is known of peers, what they are sent, and what an operator changes about them."""
