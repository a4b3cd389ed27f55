"""Names of tests.zoo, while imports move there."""

from tests.zoo import *  # noqa: F403
