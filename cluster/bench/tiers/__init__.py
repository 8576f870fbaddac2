"""Tiers below the device: what hits cost and bring, and what the others notice of them."""
