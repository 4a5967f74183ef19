"""Graph passes: each turns one pattern of the portable graph into a form a backend runs well."""
