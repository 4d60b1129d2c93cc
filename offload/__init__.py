"""The campaign PF1: thin faces over ``fairtrial``, which knows nothing of it."""
