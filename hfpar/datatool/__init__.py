"""`hfpar data`: what training makes of a data set, looked at before it is trained on."""
