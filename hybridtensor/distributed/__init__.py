"""Process groups: what of this library touches more than one rank lives here."""
