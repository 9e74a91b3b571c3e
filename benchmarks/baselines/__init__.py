"""Published mechanisms that ours are measured against, as published: no part of the product."""
