// A prompt that is long enough for a prefill worker, whatever the router's limit for local prefill is by default.
// The built-in model, which is too small for most questions, nearly always answers this one correctly.

const NAMES = ["Ada", "Ben", "Chidi", "Dana", "Emeka", "Fumi", "Gita", "Hugo", "Iris", "Jonas", "Kemi", "Lars"];
const LEGS = 36; // about 1,000 tokens

// `first` makes it another one than before, so that no prefix cache has it.
export function longPrompt(first) {
  const legs = Array.from({ length: LEGS }, (_, leg) => {
    const [runner, next] = [NAMES[(first + leg) % NAMES.length], NAMES[(first + leg + 1) % NAMES.length]];
    return `Leg ${leg + 1}: ${runner} ran 400 meters in ${52 + ((first + 7 * leg) % 19)} seconds and handed the baton to ${next}.`;
  });
  const lunch = "After the race the teams had lunch in Vienna.";
  const question = "Where did the teams have lunch? Answer in one short sentence.";
  return `Minutes of relay race number ${first}. ${lunch}\n${legs.join("\n")}\n\n${question}`;
}
