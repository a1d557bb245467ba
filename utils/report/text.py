"""Text for the terminal."""


def columns(rows):
    """Formats rows of strings as lines of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (zip(row, widths, strict=True) for row in rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines
    )
