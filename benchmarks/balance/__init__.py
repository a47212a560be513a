"""How evenly devices are loaded: Libra, as printed and as built, beside other ways to balance."""
