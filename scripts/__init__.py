"""The programs: train and sample denoisers and VAEs."""
