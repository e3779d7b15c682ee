"""`python -m hf_memkit` is `memkit`."""

from hf_memkit.cli import main_and_exit

if __name__ == "__main__":
    main_and_exit()
