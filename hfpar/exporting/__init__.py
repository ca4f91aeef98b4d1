"""`hfpar export`: an adapter merged into its base, or alone, as others load it."""
