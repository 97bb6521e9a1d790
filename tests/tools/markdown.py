"""Tables as the benchmarks print them."""


def table_of(printed: str) -> list[dict[str, str]]:
    """Rows by column, of all tables one after another."""
    rows, columns, lines = [], [], printed.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if after.startswith("|--"):
            columns = cells
        elif line.startswith("| "):
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows
