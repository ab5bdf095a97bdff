"""Other methods, trained from the same float network: a file each; ``run.py`` trains them."""
