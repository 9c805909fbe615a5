"""Names that the generators draw from."""

__all__ = ["ANIMALS", "CITIES", "COLOURS", "PEOPLE"]

COLOURS = """
    amber azure black bronze brown copper coral cream crimson cyan dark emerald golden green
    grey indigo ivory jade lemon light lilac maroon olive orange pearl pink purple red rose ruby
    sapphire scarlet silver tan teal turquoise velvet violet white yellow
""".split()  # noqa: SIM905 - a list with one name a line would be long

ANIMALS = """
    badger bear beaver bison camel crane crow deer dolphin eagle falcon ferret finch fox frog
    gull hare hawk heron horse ibis jaguar koala lark lion lynx marten mole moose otter owl
    panda puma raven robin seal shark sparrow stork swan tiger trout turtle viper walrus whale
    wolf wren
""".split()  # noqa: SIM905 - a list with one name a line would be long

CITIES = """
    Amsterdam Athens Berlin Bogota Boston Cairo Chicago Dakar Delhi Dublin Geneva Hanoi Helsinki
    Lagos Lima Lisbon London Madrid Milan Munich Nairobi Osaka Oslo Paris Prague Quito Riga Rome
    Seoul Stockholm Sydney Tokyo Toronto Vienna Warsaw Zurich
""".split()  # noqa: SIM905 - a list with one name a line would be long

PEOPLE = """
    Ada Alan Amy Anna Ben Carl Clara Dana David Emma Erik Eva Felix Grace Hugo Ida Ivan Jane
    Jonas Karl Lea Leo Lena Maria Max Mia Nina Noah Olga Oscar Paul Peter Rosa Sam Sara Tim Tom
    Uma Vera
""".split()  # noqa: SIM905 - a list with one name a line would be long
