"""A worker's stand-in: raises the layer counter of an inherited page when told how often."""

import sys

from pdnode.fabric._native import LayerCounter


def main() -> None:
    page_fd, wake_fd = int(sys.argv[1]), int(sys.argv[2])
    counter = LayerCounter(page_fd, [wake_fd])
    for line in sys.stdin:
        for _ in range(int(line)):
            counter.raise_layer()
        sys.stdout.write(f"{counter.value}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
