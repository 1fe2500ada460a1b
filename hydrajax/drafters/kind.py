"""A kind of drafter, as the group ``drafters`` of `hydrajax.plugins` names it."""

from dataclasses import dataclass

from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.settings import Settings
from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter. Its declaration stands in the module of its class.

    Attributes:
        drafter: its class. A trained one has ``Settings`` (`hydrajax.drafters.trainable.Trainable`). One whose shape
            depends on the base has ``for_base(config, dtype, settings)``.
        settings: of released heads, if not the defaults.
        about: help text of a drafter without weights, which ``--draft`` and `hydrajax.load` accept by name.
        numbers: names of the numbers that may follow that name (`hydrajax.formats.draft_ref`), the first fields of the
            class.
        given: these numbers, as parsed.
    """

    title: str
    drafter: type
    settings: Settings | None = None
    about: str = ""
    numbers: tuple[str, ...] = ()
    given: tuple[int, ...] = ()

    def build(self, config: LlamaConfig, dtype) -> Drafter:
        """Return the drafter for a base of this shape, heads in their released size.

        Raises:
            HydrajaxError: a drafter with weights has no ``for_base``.
        """
        if hasattr(self.drafter, "for_base"):
            return self.drafter.for_base(config, dtype, self.settings)
        if not self.about:
            raise HydrajaxError(
                f"{self.title}: got {self.drafter.__name__} without for_base, expected this method: it returns the "
                "drafter for fresh parameters (docs/adding_a_drafter.md)"
            )
        return self.drafter(*self.given)
