"""What keeps the data of a page from becoming code."""

import json

import pytest

from mixnn.apps import webpage

TEXT = "</script><!--\u2028&{{script}}\udc80"


def test_json_can_stand_in_a_script_element_and_says_the_same():
    made = webpage.as_json({TEXT: [TEXT]})
    assert json.loads(made) == {TEXT: [TEXT]}
    assert not set(made) & set("<>&\u2028\udc80")
    with pytest.raises(ValueError, match="not JSON compliant"):
        webpage.as_json(float("nan"))


def test_what_is_filled_in_is_not_filled_again():
    assert webpage.fill("{{a}} {{b}} {a}", a="{{b}}", b="{{a}}") == "{{b}} {{a}} {a}"


def test_a_policy_allows_the_pages_own_style_script_and_images_alone():
    alone = webpage.policy("a {}").split("; ")
    hashed = webpage.digest("a {}")
    assert alone == [
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        f"style-src {hashed}",
        "img-src data:",
    ]
    served = set(webpage.policy("a {}", "run()", served=True).split("; "))
    assert served - set(alone) == {f"script-src {webpage.digest('run()')}", "img-src data: 'self'"}


def test_a_head_holds_the_policy_of_its_style_and_script_and_a_title_that_is_text():
    made = webpage.head("<b>cats</b>", "a {}", "run()", served=True)
    assert "<title>&lt;b&gt;cats&lt;/b&gt;</title>" in made
    assert f'content="{webpage.policy("a {}", "run()", served=True)}"' in made
    assert "<style>a {}</style>" in made
