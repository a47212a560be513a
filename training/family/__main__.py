"""`python -m training.family`."""

from training.family.make import main

if __name__ == "__main__":
    main()
