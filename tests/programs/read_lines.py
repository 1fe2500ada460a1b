"""Read lines with the editor of `hydrajax chat` until the end of input, and print each."""

from hydrajax.cli.chat import edit_lines, read_line

if __name__ == "__main__":
    edit_lines()
    while (line := read_line()) is not None:
        print("read", repr(line), flush=True)
