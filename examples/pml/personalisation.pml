<pml>
  <!-- A learner in six traits, each of them one of several. -->
  <schema name="personalisation">
    <system>You advise teachers. You describe learners in plain words.</system>
    <user>
      A learner is described by six traits.
      1. School.
      <union>
        <module name="primary-school">
          The learner is in primary school: reads short texts, counts well, and learns by playing.
        </module>
        <module name="secondary-school">
          The learner is in secondary school: has several teachers, takes notes, and asks why.
        </module>
        <module name="university">
          The learner is at a university: works alone, reads long texts, and plans the week.
        </module>
        <module name="evening-classes">
          The learner works by day and takes classes in the evening: time is short, and patience too.
        </module>
      </union>
      2. Knowledge of the subject.
      <union>
        <module name="beginner">
          The subject is new: every word that is not used every day has to be explained.
        </module>
        <module name="advanced">
          The subject is known: exercises may be hard, and explanations brief.
        </module>
        <module name="expert">
          The subject is a second home: only what is disputed or new is of interest.
        </module>
      </union>
      3. When it was last studied.
      <union>
        <module name="last-week">
          It was studied last week, and most of it is still there.
        </module>
        <module name="last-year">
          It was studied last year: a short repetition brings most of it back.
        </module>
        <module name="never">
          It was never studied before.
        </module>
      </union>
      4. How the learner likes to learn.
      <union>
        <module name="by-ear">
          What is heard is remembered: lectures, talk, and stories that are read aloud.
        </module>
        <module name="by-eye">
          What is seen is remembered: drawings, charts, and colours.
        </module>
        <module name="by-hand">
          What is done is remembered: experiments, models, and long walks.
        </module>
      </union>
      5. How progress is seen.
      <union>
        <module name="essay">
          Progress is seen in essays, which are written at home and discussed in class.
        </module>
        <module name="quiz">
          Progress is seen in a quiz at the end of each week.
        </module>
        <module name="project">
          Progress is seen in a project that the learner shows to others.
        </module>
      </union>
      6. What drives the learner.
      <union>
        <module name="curious">
          Curiosity is enough: the learner goes on after the lesson.
        </module>
        <module name="ambitious">
          Marks and praise count: the learner wants to be among the best.
        </module>
        <module name="hesitant">
          The learner hesitates, and needs to hear that mistakes are part of it.
        </module>
      </union>
    </user>
    <assistant>I have read the six traits.</assistant>
  </schema>

  <prompt schema="personalisation">
    <secondary-school/><beginner/><last-year/><by-ear/><essay/><curious/>
    <user>Describe this learner in two sentences.</user>
  </prompt>

  <prompt schema="personalisation">
    <evening-classes/><advanced/><last-week/><by-hand/><project/><hesitant/>
    <user>What should the next lesson look like?</user>
  </prompt>
</pml>
