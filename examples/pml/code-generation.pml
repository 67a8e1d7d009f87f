<pml>
  <!-- A small game in five files. A prompt imports the files that it needs. -->
  <schema name="code-generation">
    <system>You write short Python programs with the classes that you are given.</system>
    <user>
      These are the files of a game in which boats carry goods between islands.
      <module name="island.py">
        # island.py
        class Island:
            """A place with a harbour. Goods are counted in crates."""

            def __init__(self, name, crates=0):
                self.name = name
                self.crates = crates

            def load(self, boat, count):
                taken = min(count, self.crates, boat.room())
                self.crates -= taken
                boat.crates += taken
                return taken
      </module>
      <module name="boat.py">
        # boat.py
        class Boat:
            """A boat lies at an island or is at sea."""

            def __init__(self, name, hold=10):
                self.name = name
                self.hold = hold
                self.crates = 0
                self.island = None

            def room(self):
                return self.hold - self.crates

            def sail(self, island):
                self.island = island
      </module>
      <module name="chart.py">
        # chart.py
        class Chart:
            """Distances between islands, in days."""

            def __init__(self):
                self.days = {}

            def connect(self, first, second, days):
                self.days[first.name, second.name] = days
                self.days[second.name, first.name] = days

            def between(self, first, second):
                return self.days[first.name, second.name]
      </module>
      <module name="captain.py">
        # captain.py
        class Captain:
            """Whoever commands a boat; is paid by the crate."""

            def __init__(self, name, boat):
                self.name = name
                self.boat = boat
                self.coins = 0

            def deliver(self, island):
                self.coins += self.boat.crates
                island.crates += self.boat.crates
                self.boat.crates = 0
      </module>
      <module name="game.py">
        # game.py
        class Game:
            """Days pass; the captain with the most coins wins."""

            def __init__(self, chart, captains):
                self.chart = chart
                self.captains = captains
                self.day = 0

            def winner(self):
                return max(self.captains, key=lambda captain: captain.coins)
      </module>
    </user>
    <assistant>I have read the files.</assistant>
    <scaffold modules="island.py boat.py chart.py captain.py game.py"/>
  </schema>

  <prompt schema="code-generation">
    <island.py/><boat.py/><chart.py/><captain.py/><game.py/>
    <user>Write a main function that makes two islands, one boat, its captain and the game.</user>
  </prompt>

  <prompt schema="code-generation">
    <island.py/><boat.py/>
    <user>Write a function that loads a boat at an island until it is full.</user>
  </prompt>
</pml>
