"""Kit: what learners and instructors are handed: two zips that run in an empty folder."""
