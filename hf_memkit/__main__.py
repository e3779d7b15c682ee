"""`python -m hf_memkit` is `memkit`, which starts here, too."""

from hf_memkit.common.search_path import omit_current_folder


def main() -> None:
    """Runs the command line, without files of the current folder."""
    omit_current_folder()
    from hf_memkit.cli import main_and_exit

    main_and_exit()


if __name__ == "__main__":
    main()
