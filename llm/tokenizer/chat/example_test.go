package chat_test

import (
	"fmt"
	"log"

	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// chat.Load reads the template of a model's folder.
func ExampleTemplate_Render() {
	t, err := chat.Parse("{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n"+
		"{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}",
		[]byte(`{"bos_token": "<s>"}`))
	if err != nil {
		log.Fatal(err)
	}

	text, err := t.Render([]chat.Message{{Role: "user", Content: "What is Go?"}},
		chat.Options{AddGenerationPrompt: true})
	if err != nil {
		log.Fatal(err)
	}

	fmt.Printf("%q\n", text)
	// Output: "<s>[user] What is Go?\n[assistant] "
}
