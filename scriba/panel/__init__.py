"""What operators do in Django's admin: resolve dead letters, watch projections live, and steer them."""
