"""Length policies, one file each: how many tokens to draft."""
