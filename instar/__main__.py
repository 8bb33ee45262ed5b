import sys

from instar.cli import main

sys.exit(main())
