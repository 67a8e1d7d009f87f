<pml>
  <!-- Arguments are new tokens in the middle of a module that is read as it is. -->
  <schema name="travel-planner">
    <system>You plan journeys by train and on foot.</system>
    <user>
      <module name="journey">
        I want to travel for <param name="days" len="6" scaffold="some days"/> with
        <param name="company" len="10" scaffold="nobody"/>. I get up early, I like to walk, and I do
        not want to see more than one museum a day.
        <union>
          <module name="at-home">
            I stay in my own country, and begin in <param name="city" len="8"/>. I know its sights.
            Show me what its people like: a market, a park, a bench by the water.
          </module>
          <module name="abroad">
            I go abroad, and I need to know how to get there by train.
            <union>
              <module name="lisbon">
                Lisbon lies on hills above a wide river. Yellow trams climb them, the tiles on the
                walls are blue, and by the evening the wind smells of the sea.
              </module>
              <module name="vienna">
                Vienna has coffee houses in which one may sit all day with a newspaper, vineyards
                that begin where a tram line ends, and music in every second street.
              </module>
              <module name="bergen">
                Bergen has wooden houses at a harbour and seven hills around it. It rains on two days
                of three, and a train goes from there over the mountains.
              </module>
            </union>
          </module>
        </union>
      </module>
    </user>
    <assistant>I have understood what you are looking for.</assistant>
  </schema>

  <prompt schema="travel-planner">
    <journey days="a week" company="my two sisters">
      <abroad><lisbon/></abroad>
    </journey>
    <user>What do we do on the first day?</user>
  </prompt>

  <prompt schema="travel-planner">
    <journey days="three days">
      <at-home city="Graz"/>
    </journey>
    <user>Where do I go in the morning?</user>
  </prompt>
</pml>
