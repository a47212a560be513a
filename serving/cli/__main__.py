"""`python -m serving.cli`: the `jmoe` command."""

from serving.cli.main import main

if __name__ == "__main__":
    main()
